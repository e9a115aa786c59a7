"""Tools that clients are known to bring, and the questions that they answer."""

from __future__ import annotations

from dataclasses import dataclass

from training.rill.text import words


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """Tools of one purpose. `{0}` in a question is the first parameter's value.

    Each parameter has its possible names and the kind of its values. A parameter that some question lacks is optional.
    Of two families with one `topic`, a request never has both: each could answer the other's questions.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[tuple[str, ...], str], ...]
    questions: tuple[str, ...]
    topic: str


def _family(names: str, descriptions: str, parameters: str, questions: str, topic: str = "") -> ToolFamily:
    """Read a family: descriptions and questions are divided by `|`, parameters are `name,other name:kind`."""
    pairs = tuple(tuple(one.split(":")) for one in words(parameters))
    return ToolFamily(
        words(names), tuple(descriptions.split("|")), tuple((tuple(n.split(",")), kind) for n, kind in pairs),
        tuple(questions.split("|")), topic or words(names)[0],
    )  # fmt: skip


FAMILIES = (
    _family("get_weather get_current_weather weather fetch_weather getWeather weather_lookup",
        "Get the current weather in a city.|Get the weather in a given location|Returns the weather.|"
        "Get current temperature for a given location.",
        "location,city,place,location:city unit,units,format:degrees",
        "What is the weather in {0}?|What's the weather like in {0}?|How is the weather in {0} today?|"
        "Weather in {0}|What is the temperature in {0}?|What is the weather in {0} in {1}?|Is it raining in {0}?|"
        "Tell me the weather in {0} in degrees {1}.|How warm is it in {0}?|How cold is it in {0}, in {1}?|"
        "What's the weather like in {0} today?|Is it sunny in {0}?", "weather"),
    _family("get_forecast weather_forecast forecast", "Get the weather forecast of a city.|Forecast for some days.",
        "city,location:city days,num_days:small",
        "What will the weather be in {0} in the next {1} days?|Give me the forecast for {0} for {1} days.|"
        "Forecast for {0}, {1} days|Show me a {1} day forecast of {0}.", "weather"),
    _family("get_time get_current_time current_time time_now", "Get the current time.|Returns the time in a city.",
        "city,location,place:city", "What time is it in {0}?|What is the time in {0}?|Tell me the time in {0}.|"
        "What's the current time in {0}?|Time in {0}?", "time"),
    _family("get_time get_current_time current_time", "Get the current time in a timezone.",
        "timezone,tz:zone", "What time is it in {0}?|What is the current time in {0}?|Time in {0}, please.", "time"),
    _family("add sum add_numbers plus", "Add two numbers.|Returns the sum of a and b.",
        "a,x,first:number b,y,second:number",
        "What is {0} plus {1}?|Add {0} and {1}.|What is {0} + {1}?|Add {1} to {0}.|What is the sum of {0} and {1}?|"
        "Compute {0} + {1}|How much is {0} + {1}?"),
    _family("multiply times multiply_numbers product mul", "Multiply two numbers.|Returns the product of a and b.",
        "a,x,first:number b,y,second:number",
        "What is {0} times {1}?|Multiply {0} by {1}.|What is {0} * {1}?|Multiply {0} and {1}|How much is {0} x {1}?|"
        "What is the product of {0} and {1}?|Compute {0} * {1}."),
    _family("subtract minus", "Subtract b from a.", "a,x:number b,y:number",
        "What is {0} minus {1}?|Subtract {1} from {0}.|What is {0} - {1}?|Compute {0} - {1}."),
    _family("sqrt square_root", "Square root of a number.", "x,value,number:number",
        "What is the square root of {0}?|Compute the square root of {0}.|Square root of {0}?"),
    _family("search web_search search_web google_search find_pages",
        "Search the web.|Searches the internet for a query.",
        "query,q,text:topic limit,max_results:small",
        "Search for {0}.|Search the web for {0}|Look up {0} on the web.|Find pages about {0}.|"
        "Search for {0}, {1} results.|"
        "Find {1} pages about {0}.|Google {0}"),
    _family("search_docs search_documentation search_knowledge_base", "Search the documentation.",
        "query,question:topic", "Search the documentation for {0}.|Look for {0} in the documentation.|"
        "Search the docs for {0}.|What do the docs say about {0}?"),
    _family("send_email email send_mail", "Send an email.|Sends an e-mail to a recipient.",
        "to,recipient,address:email subject,title:title body,text,content:text",
        'Send an email to {0} with the subject "{1}".|Send an email to {0} with subject {1} and body {2}.|'
        'Email {0} with the subject {1} and the text "{2}".|'
        'Write an email to {0} with the subject "{1}" saying "{2}".|'
        "Send a mail to {0} with subject {1}."),
    _family("send_message send_sms text_message", "Send a text message to a person.",
        "to,recipient,contact:person text,message,body:text",
        'Send a message to {0}: {1}.|Text {0} "{1}".|Send {0} the message "{1}".|Tell {0}: {1}.|'
        'Message {0} saying "{1}"'),
    _family("get_stock_price stock_price get_quote stock", "Get the stock price of a symbol.|Current price of a stock.",
        "symbol,ticker:symbol", "What is the stock price of {0}?|What is the price of {0}?|Get the stock price of {0}.|"
        "How much is {0} stock?|Stock price of {0}|What is {0} trading at?|How is {0} stock doing?"),
    _family("convert_currency currency_convert exchange convert", "Convert money from one currency to another.|"
        "Converts an amount between currencies.",
        "amount,value:number from_currency,from,source:currency to_currency,to,target:currency",
        "Convert {0} {1} to {2}.|How much is {0} {1} in {2}?|What is {0} {1} in {2}?|Change {0} {1} into {2}|"
        "How many {2} are {0} {1}?|Convert {0} {1} into {2}", "currency"),
    _family("get_exchange_rate exchange_rate", "Get the exchange rate of two currencies.",
        "base,from:currency target,to:currency",
        "What is the exchange rate from {0} to {1}?|Exchange rate of {0} to {1}|"
        "What is the rate of {0} in {1}?", "currency"),
    _family("create_event add_event create_calendar_event schedule_event", "Create an event in the calendar.",
        "title,name,summary:title date,day:date time,start,start_time:time",
        'Create an event "{0}" on {1} at {2}.|Add {0} to my calendar on {1} at {2}.|Schedule "{0}" for {1} at {2}|'
        'Put {0} in my calendar for {1}.|Create an event called {0} on {1}.|Create the event "{0}" on {1}.'),
    _family("set_alarm create_alarm wake_me", "Set an alarm.", "time,at:time",
        "Set an alarm for {0}.|Wake me at {0}.|Wake me up at {0}|Alarm at {0}, please.|Set my alarm to {0}."),
    _family("set_timer start_timer timer", "Start a timer.", "minutes,duration_minutes:small label,name:title",
        "Set a timer for {0} minutes.|Start a {0} minute timer.|Timer, {0} minutes|Set a {0} minute timer called {1}."),
    _family("create_reminder remind add_reminder", "Create a reminder.", "text,message:text time,when:time",
        'Remind me at {1}: {0}.|Create a reminder "{0}" at {1}.|Remind me at {1} with "{0}".'),
    _family("translate translate_text", "Translate a text.|Translates text into another language.",
        "text,content:text language,target_language,to:language",
        'Translate "{0}" to {1}.|Translate {0} into {1}.|What is "{0}" in {1}?|How do I say "{0}" in {1}?'),
    _family("get_user find_user user_info", "Get a user by id.|Look up a user.", "user_id,id:integer",
        "Show user {0}.|Who is user {0}?|Get the user with id {0}|Look up user {0}.|Find the user with the id {0}."),
    _family("read_file open_file cat get_file", "Read a file.|Returns the content of a file.",
        "path,file,filename:path",
        "Read the file {0}.|Show me {0}|What is in {0}?|Open {0}.|Print the content of {0}.|Read {0}"),
    _family("write_file save_file", "Write text to a file.", "path,file:path content,text:text",
        'Write "{1}" to {0}.|Save "{1}" in the file {0}.|Write {1} into {0}.'),
    _family("delete_file remove_file rm", "Delete a file.", "path,file,filename:path",
        "Delete {0}.|Remove the file {0}|Delete the file {0}.|Please remove {0}."),
    _family("play_music play_song play", "Play music.", "song,title,track:title artist,by:person",
        'Play "{0}" by {1}.|Play {0} by {1}|Play the song {0}.|I want to hear "{0}" by {1}.'),
    _family("book_flight search_flights find_flights", "Find flights.|Book a flight between two cities.",
        "origin,from,departure:city destination,to,arrival:city date,day:date",
        "Book a flight from {0} to {1} on {2}.|Find flights from {0} to {1} on {2}|Fly from {0} to {1} on {2}.|"
        "I need a flight from {0} to {1}.|Find me a flight from {0} to {1}."),
    _family("book_hotel find_hotel search_hotels", "Book a hotel.", "city,location:city nights,num_nights:small",
        "Book a hotel in {0} for {1} nights.|Find a hotel in {0} for {1} nights|I need a hotel in {0}.|"
        "Book me a hotel in {0}, {1} nights."),
    _family("find_restaurant search_restaurants restaurants", "Find restaurants in a city.",
        "city,location:city dish,food,cuisine:dish",
        "Find a restaurant in {0}.|Where can I eat {1} in {0}?|Find a place with good {1} in {0}.|Restaurants in {0}"),
    _family("turn_on_light light_on switch_on_light", "Turn on the light in a room.",
        "room,where:room colour,color:colour",
        "Turn on the light in the {0}.|Switch on the {0} light.|Light in the {0}, please.|"
        "Turn on the {1} light in the {0}.|Make the light in the {0} {1}."),
    _family("set_temperature set_thermostat heat", "Set the temperature of a room.",
        "room,where:room degrees,temperature:small",
        "Set the temperature in the {0} to {1} degrees.|Heat the {0} to {1} degrees.|Make it {1} degrees in the {0}."),
    _family("get_news news latest_news", "Get the latest news.", "topic,about,query:topic",
        "What is the news about {0}?|Any news about {0}?|Latest news about {0}|Show me the news on {0}."),
    _family("define_word get_definition dictionary define", "Look up a word in the dictionary.", "word,term:word",
        'What does the word "{0}" mean?|Define {0}.|Definition of {0}|Look up the word {0} in the dictionary.'),
    _family("roll_dice dice", "Roll dice.", "count,number:small sides:small",
        "Roll {0} dice.|Roll {0} dice with {1} sides.|Throw {0} dice.|Roll {0} {1}-sided dice."),
    _family("random_number get_random", "Get a random number.", "min,low,minimum:small max,high,maximum:integer",
        "Give me a random number between {0} and {1}.|Pick a number from {0} to {1}.|Random number from {0} to {1}"),
    _family("create_note add_note take_note", "Create a note.", "title,name:title text,content:text",
        'Create a note "{0}" with the text "{1}".|Note: {1}. Call it {0}.|'
        'Write a note called {0} that says "{1}".'),
    _family("create_task add_task add_todo create_ticket", "Add a task to the list.",
        "title,task,name:title priority:priority",
        'Add the task "{0}".|Add {0} to my tasks with {1} priority.|Create a task {0} with priority {1}.|'
        'New task: {0}|'
        'Create a {1} priority task "{0}".'),
    _family("get_order order_status find_order", "Get the status of an order.", "order_id,order,id:code",
        "Where is my order {0}?|What is the status of order {0}?|Show order {0}.|Check order {0}|"
        "Look up my order {0}."),
    _family("cancel_order", "Cancel an order.", "order_id,order,id:code",
        "Cancel order {0}.|Cancel my order {0}|I want to cancel the order {0}.|Please cancel {0}."),
    _family("call_contact make_call phone", "Call a person.", "name,contact,person:person",
        "Call {0}.|Phone {0}|Make a call to {0}.|Give {0} a call."),
    _family("get_capital capital_of", "Get the capital of a country.", "country,name:country",
        "What is the capital of {0}?|Capital of {0}|Name the capital of {0}."),
    _family("restart_service restart_server restart", "Restart a service.", "name,service,server:service",
        "Restart {0}.|Restart the {0} service.|The {0} service hangs, restart it.|Please restart {0}"),
    _family("get_logs show_logs tail_logs", "Show the logs of a service.", "service,name:service lines,limit:integer",
        "Show the logs of {0}.|Show me the last {1} lines of the {0} logs.|Logs of {0}|Give me {1} log lines of {0}."),
    _family("deploy deploy_service release", "Deploy a service.",
        "service,app,name:service environment,env,target:environment",
        "Deploy {0} to {1}.|Deploy {0} in {1}|Release {0} to {1}.|Bring {0} to {1}."),
    _family("run_query query_database query_table", "Read rows of a table.", "table,name:word limit,rows:integer",
        "Show {1} rows of the table {0}.|Read the table {0}.|Get {1} rows from {0}.|Query the table {0}"),
    _family("fetch_url get_page open_url browse", "Fetch a web page.", "url,link:url",
        "Open {0}.|Fetch {0}|What is on {0}?|Get the page {0}.|Read {0}."),
    _family("get_recipe find_recipe recipe", "Find a recipe.", "dish,name,food:dish servings,people:small",
        "How do I cook {0}?|Give me a recipe for {0}.|Recipe for {0} for {1} people|"
        "I want to cook {0} for {1} people."),
    _family("export_report export create_report", "Export a report.", "name,title,report:title format,type:format",
        'Export the report "{0}" as {1}.|Export {0} as {1}.|Give me the report {0} as {1}.'),
    _family("list_users get_users users", "List users.", "limit,count:small order,sort:order",
        "List {0} users.|Show me {0} users in {1} order.|List {0} users, {1}.|Give me the first {0} users."),
    _family("get_person_info get_contact contact_info", "Look up a contact.", "name,person,contact:person",
        "What is the phone number of {0}?|Look up {0} in my contacts.|Find the contact {0}.|"
        "What is the address of {0}?"),
    _family("get_current_time get_time current_time now", "Get the current time.", "",
        "What time is it?|What time is it now?|Tell me the time.|What is the current time?|Time, please.", "time"),
    _family("get_date current_date today", "Get the date of today.", "",
        "What day is it today?|What is the date today?|Which date is it?|What day is today?"),
    _family("list_tasks get_tasks show_todos", "List all tasks.", "",
        "Show my tasks.|What do I have to do?|List my tasks.|Which tasks are open?"),
    _family("stop_music pause_music", "Stop the music.", "",
        "Stop the music.|Music off|Stop playing.|Turn off the music."),
    _family("get_location where_am_i", "Get the location of the user.", "",
        "Where am I?|What is my location?|Show me where I am."),
    _family("calculate calculator evaluate", "Evaluate an arithmetic expression.", "expression,expr:sum",
        "Calculate {0}.|What is {0}?|Evaluate {0}|Compute {0}, please.|How much is {0}?", "add"),
)  # fmt: skip
# Tools of the evaluation, with names, parameters and questions of their own. Rill is never trained on them.
HELD_OUT_FAMILIES = (
    _family("get_distance route_length", "Get the distance between two cities.", "start:city end:city",
        "How far is it from {0} to {1}?|What is the distance between {0} and {1}?"),
    _family("track_package parcel_status", "Track a package.", "tracking_number:code",
        "Where is my package {0}?|Track the package {0}."),
    _family("resize_image scale_picture", "Resize an image.", "file:path width:integer height:integer",
        "Resize {0} to {1} by {2} pixels.|Scale the image {0} to {1} x {2}."),
    _family("reserve_table book_table", "Reserve a table in a restaurant.", "guests:small time:time",
        "Reserve a table for {0} people at {1}.|I need a table for {0} at {1}."),
    _family("scale_deployment set_replicas", "Set the number of replicas of a deployment.",
        "deployment:service replicas:small",
        "Scale {0} to {1} replicas.|Run {1} replicas of {0}."),
    _family("get_movie movie_info", "Get information about a movie.", "title:title",
        'Who directed the movie "{0}"?|Tell me about the movie "{0}".'),
    _family("set_volume change_volume", "Set the volume of the speaker.", "level:small",
        "Set the volume to {0}.|Change the volume to {0}."),
    _family("get_population population", "Get the population of a country.", "country:country",
        "How many people live in {0}?|What is the population of {0}?"),
    _family("paint_wall paint", "Paint a wall of a room.", "room:room color:colour",
        "Paint the {0} {1}.|Paint the wall of the {0} in {1}."),
    _family("divide division", "Divide a by b.", "numerator:number denominator:number",
        "What is {0} divided by {1}?|Divide {0} by {1}."),
    _family("invite_user add_member", "Invite a person to a team.", "email:email team:word",
        "Invite {0} to the team {1}.|Add {0} to team {1}."),
    _family("pay_invoice settle_bill", "Pay an invoice.", "invoice_id:code amount:number",
        "Pay the invoice {0} of {1} dollars.|Pay {1} dollars for invoice {0}."),
)  # fmt: skip
